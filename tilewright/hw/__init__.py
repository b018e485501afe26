"""What machine is this: devices, rooflines, the process environment. Imports torch and triton only."""
