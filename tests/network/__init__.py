"""Jobs over several hosts that are network namespaces of this machine."""
