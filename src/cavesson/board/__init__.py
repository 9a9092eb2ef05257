"""The board: a server on this machine and the page that shows what is recorded."""
