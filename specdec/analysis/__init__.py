"""What generations did, and (later) what hardware would allow."""
