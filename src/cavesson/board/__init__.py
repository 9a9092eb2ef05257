"""The board: a local server and the web page that shows the record."""
