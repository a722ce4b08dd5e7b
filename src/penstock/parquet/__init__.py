"""The Parquet format itself: footers, page headers, and moving column chunks without decoding them.

Standard library only: a worker that splices stays at a few megabytes, which importing Arrow alone would multiply.
"""
