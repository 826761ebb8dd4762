"""The porting tool: `ported(program)`, its command, and its tables."""

from jaxstrategy._src.compat.port import (
    name_uses,
    port_command,
    program,
    rewriting,
    tables as tables,
)

main, table, ported = port_command.main, port_command.table, rewriting.ported
Generation, NoPythonError = name_uses.Generation, program.NoPythonError
