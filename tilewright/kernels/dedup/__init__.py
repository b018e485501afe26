"""Near duplicates on a GPU: MinHash signatures and the keys of their bands, in integers, with the same bits as on a CPU."""
