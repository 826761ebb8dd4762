"""`python -m jaxstrategy.doctor`: what a bug report needs, and whether devices answer.

It prints versions and devices as `jax.print_environment_info` does, and the variables
of the environment that decide how JAX runs and how processes meet (secrets left out);
and it has the devices sum an array and compares the result. It ends with 0 if all is
well, else with 1.

    python -m jaxstrategy.doctor                 # the devices there are
    python -m jaxstrategy.doctor --simulate 8    # simulated ones
"""
