"""What writes grammars for a library, and what compiles them: a folder for each library."""
