"""The command line `moe-qlora`: arguments go in; text, JSON or files come out.

Open app.py first, which holds the program and how errors end it. Each subcommand has a file of its
name (doctor, dump, export, merge, ...) that reads options and calls the library:

    options.py      options that several subcommands take
    render.py       what they print: tables, sentences, messages on stderr
    moe_experts.py  dump as a subcommand of axolotl
"""

from __future__ import annotations


def main() -> None:
    """Run the command line; the console script `moe-qlora` calls this."""
    from .app import run

    run()
