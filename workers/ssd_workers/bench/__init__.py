"""Measuring decoders against each other: suites of prompts, the decoders, the run, the report."""
