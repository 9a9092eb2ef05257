"""Write a record: the recorder, its journal and lock, and the files of a segment."""
