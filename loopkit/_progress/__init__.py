"""Progress: the settings of a loop that shows how far it is, and the open bars."""
