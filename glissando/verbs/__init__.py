"""One module a verb: `main(arguments)` parses and does it."""
