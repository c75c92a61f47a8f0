"""The command line `moe-qlora`: arguments go in; text, JSON or files come out.

app.py          the program, and how errors end it
options.py      options of several subcommands
render.py       tables, sentences, messages on stderr
folders.py      quantize, verify, merge, export, report; each other subcommand has its file
moe_experts.py  dump and plan as a subcommand of axolotl
"""


def main() -> None:
    """Run the command line; the console script `moe-qlora` calls this."""
    from .app import run

    run()
