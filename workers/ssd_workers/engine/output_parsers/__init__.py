"""What an output's text means: the answer, reasoning before it, and calls of tools.

The parsers are incremental and take text in whatever pieces it comes: the parts that they give
out add up to the same. Nothing here runs what a model writes.
"""
