"""The runtime: session, pair checks, chat and command line."""
