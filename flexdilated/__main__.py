"""`python -m flexdilated`."""

from flexdilated.cli import main

main()
