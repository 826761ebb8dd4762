"""Several programs one after the other, in the same processes of one job."""

import importlib


def main(names):
    for name in names:
        print(f"=== {name}", flush=True)
        importlib.import_module(f"workers.{name}").main()
        print("all is well", flush=True)
    print("=== end", flush=True)
