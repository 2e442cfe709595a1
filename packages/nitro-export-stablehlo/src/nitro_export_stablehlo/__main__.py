"""Runs `nitro-bundle` as `python -m nitro_export_stablehlo`."""

from ._cli import main

if __name__ == "__main__":
    main()
