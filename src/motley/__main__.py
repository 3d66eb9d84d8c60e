"""`python -m motley`: the command line."""

from motley.cli import main

main()
