"""Load tests of a service: sends requests on a schedule and reports the latencies that users would see."""
