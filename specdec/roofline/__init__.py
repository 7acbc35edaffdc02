"""Costs and speedups predicted from bytes, FLOPs and measured hardware."""
