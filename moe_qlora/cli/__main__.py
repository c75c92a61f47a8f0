"""`python -m moe_qlora.cli`."""

from . import main

main()
