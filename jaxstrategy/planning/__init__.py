"""Plans of a step, which `js.plan` makes, and devices by numbers, to plan for.

As a command, of a function that returns the arguments of `js.plan`, as a tuple or a
dict:

    python -m jaxstrategy.planning train:planned --simulate 8 --memory 16GiB
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.planning import (
        Machine as Machine,
        Plan as Plan,
        PlannedLayout as PlannedLayout,
        describe as describe,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
