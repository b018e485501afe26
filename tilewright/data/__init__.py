"""Preparation of text for training: readers, quality rules, deduplication, decontamination, token shards, and a report."""
