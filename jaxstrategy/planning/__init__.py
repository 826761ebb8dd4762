"""`python -m jaxstrategy.planning module:function`: a plan of a step, as `js.plan`.

The function returns the arguments of `js.plan`, as a tuple or a dict.

    python -m jaxstrategy.planning train:planned --simulate 8 --memory 16GiB
"""
