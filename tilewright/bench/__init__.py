"""Measurements that anyone can repeat: operators against a device copy and the vendor's, the engine on fixed workloads."""
