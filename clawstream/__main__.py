from clawstream.cli.main import main

main()
