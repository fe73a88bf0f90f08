"""Every number that the README claims: programs that print a table and write JSON with commit, device and command."""
