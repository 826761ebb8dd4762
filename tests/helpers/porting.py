"""The porting tool: `ported(program)`, its command, and its tables."""

from jaxstrategy._src.compat.port import names as names, program, rewriting

tables = names
main, table, ported = rewriting.main, rewriting.table, rewriting.ported
Generation, NoPythonError = names.Generation, program.NoPythonError
