"""Reuse of attention maps, as in AttMEMO (arXiv 2301.09262): lookup, planning and serving by layer."""
