"""Files and terminal output shared by all rooms."""
