"""The command line `moe-qlora`: `app` holds the program, and one file each of its subcommands."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the console script `moe-qlora` calls this."""
    from .app import run

    run()
