"""Communication between the ranks of a tensor-parallel model."""
