"""Parser tests of other projects, run on tilewright's parsers."""
