"""Programs: absl mains whose flags become a Setup at the door."""
