"""The operator and its cache; the public names are those of `attmemo.fastseq.ops`."""
