"""Regular expressions as trees and automata, meant alike by every reader."""
