"""CUDA graphs: definition node by node, conditional nodes, launches and mailboxes."""
