"""Tests of tool calls and reasoning in generated text."""
