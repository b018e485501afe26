"""Load tests: requests to a service on a schedule, and what its users would have felt."""
