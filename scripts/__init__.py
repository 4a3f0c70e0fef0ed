"""Programs for developers of the library, from a checkout: checks of the machine, tables for the docs."""
