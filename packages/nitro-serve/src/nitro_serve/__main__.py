"""Runs the `nitro-serve` command: `python -m nitro_serve`."""

from ._cli import main

if __name__ == "__main__":
    main()
