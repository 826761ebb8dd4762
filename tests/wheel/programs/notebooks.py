"""A notebook, run by what the extra brings."""

import nbformat
from nbclient import NotebookClient

CODE = """import jaxstrategy as js
strategy = js.MirroredStrategy(js.simulate(2))
strategy.reduce("sum", strategy.per_replica([1.0, 2.0]))"""
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
(output,) = notebook.cells[0].outputs
assert output.data["text/plain"] == "Array(3., dtype=float32)", output
