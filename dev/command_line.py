"""Command line parser of the Python programs in dev/. Wrong usage and missing packages end them with
one error line and an exit code of docs/exit_codes.md, as in the C programs.
"""
import argparse
import sys


def give_up(code, message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        give_up(2, f"{message}; {self.prog} --help lists the flags")
