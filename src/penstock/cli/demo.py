"""`penstock demo`: the whole job on a sample it makes itself."""

from __future__ import annotations

import argparse

HELP = "make a sample larger than a small budget and take it through the whole job"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", default="demo-out", metavar="DIR", help="where to work (default: demo-out)")
    parser.add_argument("--size", default="600MB", metavar="SIZE", help="of the sample (default: 600MB)")
    parser.add_argument("--memory", default="300MB", metavar="SIZE", help="the budget (default: 300MB)")


def run(args: argparse.Namespace) -> int:
    from penstock.demo import demo

    return demo(args.to, size=args.size, memory=args.memory)
