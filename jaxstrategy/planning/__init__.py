"""Plans of a step, which `js.plan` makes, and devices by numbers, to plan for.

As a command, of a function that returns the arguments of `js.plan`, as a tuple or a
dict:

    python -m jaxstrategy.planning train:planned --simulate 8 --memory 16GiB

From a program, for devices that it does not have:

>>> import jaxstrategy as js
>>> from jaxstrategy import planning
>>> _ = js.simulate(8)
>>> print(planning.describe("H100", count=8))
8 H100 of 74.5 GiB
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.planning.machine import (
        Machine as Machine,
        describe as describe,
    )
    from jaxstrategy._src.planning.plan import (
        Plan as Plan,
        PlannedLayout as PlannedLayout,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
