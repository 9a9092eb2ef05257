"""Three small trainers and their model. They use nothing of Cavesson; faults are edits of their source."""
