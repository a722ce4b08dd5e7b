"""BIDS: a tree of scans as rows, every run and every companion file kept, and nothing of the tree lost."""

from penstock.media.bids.tree import BesideFile, BidsTree, scan_bids

__all__ = ["BesideFile", "BidsTree", "scan_bids"]
