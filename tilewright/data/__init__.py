"""Text worth training on: readers, rules, deduplication, decontamination, token shards, and the report of what happened."""
