"""Runs the `nitro` command: `python -m nitro`."""

from ._cli import main

if __name__ == "__main__":
    main()
