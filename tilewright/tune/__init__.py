"""How a kernel's free choices are described and made."""
