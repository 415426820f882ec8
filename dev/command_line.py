"""The command line of the programs in Python under dev/: wrong usage and missing packages end them
as they end the programs in C, with one line and an exit code of docs/exit_codes.md.
"""
import argparse
import sys


def give_up(code, message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        give_up(2, f"{message}; {self.prog} --help lists the flags")
