from cavesson.cli import main

main()
