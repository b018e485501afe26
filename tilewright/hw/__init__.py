"""The machine: its devices, their limits and state, and the process environment. Imports torch and triton only."""
